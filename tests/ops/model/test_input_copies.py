"""A stage gets copies of what it receives if it writes into them, and no others but in its first forward."""

from __future__ import annotations

import torch

from asyncpipe.ops.model.input_copies import InputCopies


def test_a_stage_that_does_not_write_gets_copies_once():
    inputs, received = InputCopies(always=False), [torch.ones(2)]
    given = inputs.given(received, repeated=True)
    assert given[0] is not received[0]
    inputs.saw(received, given)
    assert inputs.given(received, repeated=True) is received
