"""Sections of a report, one module or folder for each subject: they turn records or explained
profiles into tables.
"""
