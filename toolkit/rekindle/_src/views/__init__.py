"""Everything that draws: HTML and SVG, Markdown and code, the cache's tree, and the types of the rooms below."""
