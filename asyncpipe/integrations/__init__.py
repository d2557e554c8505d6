"""Classes of other libraries that train by a pipeline. Each module imports its library, so none is imported here.

``transformers.py`` has ``PipelineTrainer``, a ``Trainer`` of transformers, and ``PipelineTraining``, which makes one of
other trainers; ``trl.py`` has ``PipelineSFTTrainer``. They use the facade in ``pipeline/`` as any program does. Start
reading at ``transformers.py``.
"""
