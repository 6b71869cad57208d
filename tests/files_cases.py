"""What several files of tests share: see test_files.py."""


def write(path, text):
    path.write_text(text)
    return path
