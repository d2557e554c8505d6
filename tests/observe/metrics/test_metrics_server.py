"""The server of ``/metrics``: where it listens, over plain HTTP and over TLS with certificates of clients."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics import MetricsServer, PipelineCollector, serve_metrics


@pytest.fixture
def registry(registry: CollectorRegistry, collector: PipelineCollector) -> CollectorRegistry:
    return registry


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of *localhost* that signs itself, so that it is also an authority, and its key."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*made, *named, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def scrape(server: MetricsServer, context: ssl.SSLContext | None = None) -> str:
    scheme = "http" if context is None else "https"
    with urlopen(f"{scheme}://localhost:{server.port}/metrics", context=context, timeout=20) as answer:
        return str(answer.read().decode())


def test_a_port_in_use_is_named_and_a_closed_server_frees_it(registry: CollectorRegistry) -> None:
    server = serve_metrics(registry, 0)
    assert 'asyncpipe_build_info{job="demo"' in scrape(server)
    with pytest.raises(OptionError, match=f"cannot serve metrics on 127.0.0.1:{server.port}: "):
        serve_metrics(registry, server.port)
    server.close()
    server.close()
    serve_metrics(registry, server.port).close()


@pytest.mark.promise("Security", "With a client authority, only scrapers with its certificate read the metrics.")
def test_only_scrapers_with_a_certificate_of_the_authority_are_answered(
    registry: CollectorRegistry, pair: tuple[Path, Path]
) -> None:
    certificate, key = pair
    stranger = ssl.create_default_context(cafile=certificate)
    known = ssl.create_default_context(cafile=certificate)
    known.load_cert_chain(certificate, key)
    with serve_metrics(registry, 0, certificate=certificate, key=key) as server:
        assert "asyncpipe_build_info" in scrape(server, stranger)
    with serve_metrics(registry, 0, certificate=certificate, key=key, client_authority=certificate) as server:
        assert "asyncpipe_build_info" in scrape(server, known)
        with pytest.raises((URLError, ssl.SSLError, ConnectionError)):
            scrape(server, stranger)


@pytest.mark.parametrize("wrong", ["certificate", "key", "client_authority"])
def test_files_that_cannot_be_used_are_refused(
    registry: CollectorRegistry, pair: tuple[Path, Path], wrong: str
) -> None:
    files = {"certificate": pair[0], "key": pair[1], "client_authority": pair[0], wrong: pair[0].with_name("none.pem")}
    with pytest.raises(OptionError, match="cannot serve metrics"):
        serve_metrics(registry, 0, **files)
    if wrong == "certificate":
        with pytest.raises(OptionError, match="need certificate"):
            serve_metrics(registry, 0, key=pair[1])
