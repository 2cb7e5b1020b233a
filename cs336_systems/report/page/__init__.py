"""One page in a browser that holds a report: `write_page` writes it, template, style and script
lie beside.
"""
