"""A model of Hugging Face's transformers as stages, cut between its layers without tracing it.

Every stage calls the model's own ``forward``, of an image of the model in which everything that other stages have is
replaced (``image.py``, ``stand_ins.py``). So masks, positions, rotary embeddings and heads are computed by the code of
the unsplit model, in every version of the library. Where a family has its layers is a row in ``families.py``::

    model      embed_tokens   layers 0 1 2 3 4 5   norm   lm_head
    stage 0    embed_tokens   layers 0 1
    stage 1                   layers ▸ ▸ 2 3                         ▸ passes on what stage 0 has sent
    stage 2                   layers ▸ ▸ ▸ ▸ 4 5   norm   lm_head

Start at ``cut.py``, which makes the ``StagedModel``. ``batch_inputs.py`` says what each stage takes of a tokenizer's
batch, ``counted_loss.py`` is the loss by tokens, ``refusals.py`` what would be silently wrong, and ``traced.py`` cuts
models of other families. The library itself is imported by none of them: they are given its objects.
"""
