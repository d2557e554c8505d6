"""A stage gets copies of what it receives if it writes into them, and no others but in its first forward."""

from __future__ import annotations

import pytest
import torch

from asyncpipe.errors import StageError
from asyncpipe.ops.model.input_copies import InputCopies


@pytest.mark.promise("Right results", "A stage may overwrite its inputs in place: it gets copies.")
def test_a_stage_that_does_not_write_gets_copies_once():
    inputs, received = InputCopies(always=False), [torch.ones(2)]
    given = inputs.given(received, repeated=True)
    assert given[0] is not received[0]
    inputs.saw(received, given)
    assert inputs.given(received, repeated=True) is received


@pytest.mark.promise("Refused, not wrong", "Writing into a view whose elements share memory is refused.")
@pytest.mark.parametrize("always", [True, False])
def test_writing_into_a_view_whose_elements_share_memory_is_refused(always):
    inputs, received = InputCopies(always=always), [torch.arange(8.0).as_strided((3, 4), (2, 1))]
    given = inputs.given(received, repeated=True)
    inputs.saw(received, given)
    given = InputCopies(always=always).given(received, repeated=True)
    given[0][:, 1:].mul_(2)
    with pytest.raises(StageError, match=r"elements share memory \(shape \(3, 4\), strides \(2, 1\)\)"):
        inputs.saw(received, given)
