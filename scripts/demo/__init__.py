"""The demo: serves models/splash-tiny on four CPU ranks, watches the layouts change, and checks every answer."""
