"""``Pipeline`` and what it consists of: here ``core``, ``ops`` and ``runtime`` meet. Imports these and ``errors`` only.

Start with ``pipeline.py``, then follow a step:

``options.py``, ``pool_options.py``   every option: declared, documented and checked
``build.py``, ``build_resources.py``  from model and options to the parts that all steps share
``graph_cache.py``                    lowered task graphs by shape
``step_inputs.py``                    what a step takes in, here and in a worker: a mini-batch, checked and cut
``feeding.py``                        prepares each step, with the caller's mini-batch or the feed's
``step.py``                           ``StepProtocol``: begin, run, finish or abandon; one whole step here
``steps.py``                          one step, or many that overlap, for callers that await and that block
``call.py``, ``call_backward.py``     ``y = pipe(x)``, whose loss and backward are the caller's
``result.py``                         what a step returns
``sync.py``                           the same without ``await``
``model_proxy.py``                    the model's own methods on a pipeline
``pool.py``                           devices that several pipelines share
``workers.py``                        the worker processes of a pool
``stages_here.py``                    what a pipeline asks of its stages besides steps, where they are in this process
``remote_stages.py``, ``remote_step.py``  stages in workers, as the controller sees them; one whole step there
``saving.py``                         ``save`` and ``load``; ``stage_states.py`` the states of the stages of one process
``blocking.py``                       blocking calls, for callers that await and that block
``wire_messages.py``                  what controller and workers say to each other of a pipeline
``resident/``                         what runs in a worker
``overlap.py``                        whether steps may be under way at once
``profiling.py``                      measures layers, and chooses schedule and balance by prediction
"""
