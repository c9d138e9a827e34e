"""Sensitivity scores, and the policy that turns them into a plan."""
