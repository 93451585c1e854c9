"""What people and programs see of the head, and what they ask of it.

In: requests over the control socket (`handler`), carried out by `operations`. Out: views, reports and metrics, derived
from the book and the last poll; and what ended runs have left, removed by count and age.
"""
