"""OpenRLHF: command lines and launch scripts, with flat (0.9) and dotted (0.10) flags."""
