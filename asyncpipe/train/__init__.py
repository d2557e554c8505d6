"""One run of one job, from the job file to the summary; ``asyncpipe train`` and the service use it.

Start reading with ``job_file`` (the typed job), ``workload`` (what a job's entry returns), ``training_run`` (the run as
a component), ``training_loop`` (its steps, one by one) and ``overlapping_loop`` (steps that overlap). Then:

    pipeline_table, value_types          the job file's table [pipeline], and the types of all values
    entry, import_path                   find the entry's function and call it
    planning                             measures the model and chooses a pipeline
    lasting_run, next_move, other_devices   goes on when workers are lost, on the remaining devices
    run_orders                           what is asked of a run: to stop, another schedule, another share
    batches, randomness                  data and random numbers, with states that snapshots save
    adamw, evaluation                    the weight update, the held-out loss
    step_failures, buffer_rollback, out_of_memory   retries, non-finite losses, advice when memory is full
    progress, trace_files, snapshots/    what a run reports and writes
    validation, blocking_calls           readable errors of pydantic models; calls in threads

May import ``asyncpipe.pipeline`` and what is below it; must not import the service or the command line.
"""
