"""Pages to look at: one HTML file each, with its pictures, that fetches nothing."""
