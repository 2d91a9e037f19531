"""The one form of a dataset: a folder of Arrow files, how it is made, and how it is opened."""
