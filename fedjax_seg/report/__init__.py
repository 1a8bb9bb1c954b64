"""What a run leaves behind and what is read out of it. Host side; nothing here is jitted.

writer      RunFolder: lock, log, atomic files, append-only metrics that can be rewound on resume
checkpoint  save / latest / restore of a FederatedState (the only importer of orbax)
runs        a finished run as read from its folder
tables      the tables of a study, and their CSV, Markdown and LaTeX forms
statistics  paired per-subject test, Holm's adjustment, the comparison with a reference method
figures     PNG figures, each with the CSV of the numbers drawn
html        report.md and a self-contained report.html
"""
