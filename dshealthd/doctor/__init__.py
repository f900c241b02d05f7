"""`dshealthd doctor`: is this node, and this job, fit to start?

Each check is one file that declares itself as data (`check.Check`): the symptom it looks for, its
deadline, and a function that yields results. Checks of the node are in `node/`, checks of a job in
`job/`. They run in parallel in processes that can be killed, so a hung check becomes a result that
names it.
"""
