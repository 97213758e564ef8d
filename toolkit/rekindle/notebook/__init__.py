"""Rich reprs and live views; IPython, ipywidgets and anywidget load at first use."""
