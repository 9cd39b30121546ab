"""The cost of a job before it runs: FLOPs, memory, traffic and seconds of each phase, from its configuration alone.

    job.py         what is computed: models, layout, token counts. train/planned.py makes it of a configuration.
    work.py        tables of arithmetic and traffic
    model_work.py  a pass of one model over one micro-batch, on one rank; layer_work.py: of a layer; adapters.py,
                   experts.py: what these add
    sampling.py    prefill and decoding
    phases.py      a step: which model does which passes in which phase
    memory.py      bytes that a rank holds in each phase, by kind; activations.py: what a backward pass keeps
    time.py        seconds, of a `Machine`; calibrate.py measures this CPU as one
    hardware.py    kinds of GPU (hardware.yaml) as machines
    search.py      all layouts that fit, ranked; choice.py: the result as text, or what would make the job fit

All are pure functions but calibrate.py. They model what the code does, on CPU ranks and on GPUs: `device` says which.
"""
