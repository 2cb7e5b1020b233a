"""Files of step times, of records without profiles."""

from cs336.report.formats import ON_REQUEST, pngs_of, texts_of, write_files
from cs336.report.results import Results


def write_tables(records, directory):
    return write_files(texts_of(Results(records=list(records)).steps), directory, ON_REQUEST)


def write_plots(records, directory):
    return write_files(pngs_of(Results(records=list(records)).steps), directory)
