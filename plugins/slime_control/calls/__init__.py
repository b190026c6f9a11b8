"""Control calls to many engines, and questions asked of all."""
