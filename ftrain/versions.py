def check_versions():
    pass
