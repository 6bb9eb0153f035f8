"""A small Django project: settings by `DATABASE_URL`, one app with a model, views, a worker, and tests of its own for the test runner."""
