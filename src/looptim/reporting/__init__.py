"""Tables, figures and pages of runs and evaluations; the only importer of the plotting library."""
