"""Runs golden vectors, computed by other systems, through the public algorithm functions.

``python -m tests.goldens DIR [--json]`` takes any folder of that schema; ``data/`` holds vectors that verl 0.9.1,
OpenRLHF 0.11.2, ROLL 0.3.0 and, for a few formulas, SkyRL, AReaL and prime-rl computed on a CPU. The adapters
translate a case's ``config`` into our options; they know nothing of case names or values.

Compared with rtol 1e-4 and atol 1e-5 (gradients 1e-3 and 1e-6, or a case's own tolerance) where the response mask is
1; masks, decisions, counts and integers exactly; of a partition only its quality, which may be better.
"""
