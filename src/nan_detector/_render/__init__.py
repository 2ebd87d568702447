"""Records to text, pages and pictures: record in, string or file out. Nothing here imports torch."""
