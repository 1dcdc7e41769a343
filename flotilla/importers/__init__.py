"""Import launch files of verl, OpenRLHF and ROLL: every parameter is applied, translated, ignored or refused."""
