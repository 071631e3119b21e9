"""What the ranks of a plan do: a package for each name of ``plan.job``."""
