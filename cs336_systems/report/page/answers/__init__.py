"""Answers to the course's questions from all results of a page: one module for each subject."""
