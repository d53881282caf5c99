"""Parts for models and trainers of other libraries."""
