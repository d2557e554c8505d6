"""Random models of real layers, for campaigns that compare a pipeline with the same model run otherwise.

layers.py   layers as people write them, which torch.nn does not have
pieces.py   the table of all layers that models are made of, with what campaigns must know of each
items.py    a model as plain data: pieces and spans, how they are drawn and built
"""
