"""The training step on machines beyond the one here, as events: `gradsync plan --simulate`.

    from gradsync.hardware.described.networks import load_network
    from gradsync.hardware.simulate.report import report_text
    from gradsync.hardware.simulate.simulation import simulate

    found = simulate(work, host, load_network("infiniband-ndr"), [8, 64, 512, 4096], profile)
    print(report_text(found))              # a table, and the crossover points in words
    json.dumps(found.to_json())
    plot_simulation(path, found)           # gradsync.bench.plot_simulation, needs matplotlib

`work.num_leaves` is what one replica does in a step (weak scaling); `host` is repeated as often as
the ranks need; `profile` comes from `probe_profile` or `estimate_profile`. `splits` chooses
strategies and, with `Layout(pp=, tp=)`, how a replica is divided; `failures` says how often devices
fail. Everything is pure and seeded.

    events.py       a clock that jumps, and a channel
    stragglers.py   how fast each rank is
    step.py         one step;  pipeline.py  one replica's stages
    failures.py     checkpoint interval and goodput
    crossover.py    what changes from how many ranks on
    simulation.py   all points;  report.py  for readers
"""
