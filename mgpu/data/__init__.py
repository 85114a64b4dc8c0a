"""How data is divided: the rows of one batch over towers, and later the rows of the data over ranks."""
