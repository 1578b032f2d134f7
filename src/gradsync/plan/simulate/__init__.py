"""The training step on machines beyond the one here: `gradsync plan --simulate`.

found = simulate(work, host, load_network("infiniband-ndr"), [8, 64, 512, 4096], profile)
print(report_text(found))              # a table, and the crossover points in words
json.dumps(found.to_json())
plot_simulation(path, found)           # gradsync.bench.plot, needs matplotlib
"""
