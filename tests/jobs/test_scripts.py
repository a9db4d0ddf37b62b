"""The scripts refuse to start what they cannot finish: the packages that are missing are listed, the exit code is 64,
and nothing is built."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from jobs import ROOT

SCRIPTS = ("launch/quickstart.sh", "tests/run.sh", ".ci/run")
DEBIAN = 'ID=debian\nVERSION_ID="12"\n'


class Scripts(unittest.TestCase):
    """Runs copies of the scripts among programs, first in PATH, that only pretend and note how they are called."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-scripts-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        for script in (*SCRIPTS, "launch/install_packages.sh"):
            (self.folder / script).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / script, self.folder / script)
        self.fakes = self.folder / "fakes"
        self.fakes.mkdir()
        self.calls = self.folder / "calls"
        self.os_release = self.folder / "os-release"
        self.installed()
        for name in ("cmake", "ctest", "ninja", "mpirun"):
            self.pretend(name, "[ \"$*\" != --version ] || echo 'cmake version 3.25.1'")
        self.pretend("sudo", "exit 1")
        self.pretend("apt-get", "echo 'E: Unable to locate package'; exit 100")
        self.become(root=False)
        self.os_release.write_text(DEBIAN)

    def pretend(self, name, body):
        path = self.fakes / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.calls}"\n{body}\n')
        path.chmod(0o755)

    def installed(self, but=()):
        """All packages are there `but` these."""
        absent = "|".join(but) or "-"
        self.pretend("dpkg-query", f'for p; do :; done; case $p in {absent}) exit 1;; *) printf installed;; esac')

    def become(self, root):
        self.pretend("id", f"echo {0 if root else 1000}")

    def run_script(self, script, **variables):
        self.calls.write_text("")
        env = {**os.environ, "PATH": f"{self.fakes}:/usr/bin:/bin", "HOLDFAST_OS_RELEASE": str(self.os_release),
               **variables}
        done = subprocess.run([self.folder / script], cwd="/", env=env, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False)
        done.calls = [line for line in self.calls.read_text().splitlines()
                      if line.split()[0] in ("cmake", "ctest", "ninja", "mpirun", "sudo", "apt-get")
                      and line != "cmake --version"]
        return done

    def assert_refuses(self, *says, script=SCRIPTS[0], may_call=()):
        done = self.run_script(script)
        self.assertEqual(64, done.returncode, done.stdout)
        for text in says:
            self.assertIn(text, done.stdout)
        self.assertIn("Nothing was built", done.stdout)
        self.assertEqual([], [call for call in done.calls if not call.startswith(may_call or "-")], done.stdout)
        self.assertFalse((self.folder / "build").exists())
        return done

    def test_without_root_and_without_sudo(self):
        self.installed(but=("libtorch-dev", "cmake"))
        for script in SCRIPTS:
            with self.subTest(script):
                done = self.assert_refuses("needs root or sudo", "\n  libtorch-dev\n", "\n  cmake\n", script=script,
                                           may_call=("sudo",))
                self.assertNotIn("libfmt-dev", done.stdout)

    def test_on_another_distribution(self):
        self.become(root=True)
        self.installed(but=("libcli11-dev",))
        for release, name in (('ID=ubuntu\nVERSION_ID="24.04"\n', "ubuntu 24.04"),
                              ('ID=debian\nVERSION_ID="13"\n', "debian 13"), ("ID=debian\n", "debian")):
            with self.subTest(name):
                self.os_release.write_text(release)
                for script in SCRIPTS:
                    self.assert_refuses("Debian 12 only", name, "\n  libcli11-dev\n", "HOLDFAST_SKIP_PACKAGES=1",
                                        script=script)

    def test_without_the_file_that_names_the_distribution(self):
        self.installed(but=("libcli11-dev",))
        self.os_release.unlink()
        self.assert_refuses("Debian 12 only", "libcli11-dev")

    def test_where_packages_cannot_be_looked_up_all_are_listed(self):
        self.pretend("dpkg-query", "exit 127")
        self.os_release.write_text("ID=fedora\nVERSION_ID=40\n")
        self.assert_refuses("fedora 40", "\n  g++\n", "\n  libtorch-dev\n", "\n  dataset-fashion-mnist\n")

    def test_what_only_tests_need_is_not_asked_for_by_others(self):
        self.become(root=True)
        self.installed(but=("prometheus",))
        for script, wanted in (("launch/quickstart.sh", False), ("tests/run.sh", True), (".ci/run", True)):
            with self.subTest(script):
                done = self.run_script(script)
                asked = [call for call in done.calls if "install" in call.split() and "prometheus" in call.split()]
                self.assertEqual(wanted, bool(asked), done.stdout)

    def test_when_apt_cannot_deliver(self):
        self.become(root=True)
        self.installed(but=("libtorch-dev",))
        for script in SCRIPTS:
            with self.subTest(script):
                self.assert_refuses("Unable to locate package", "apt-get could not install", "\n  libtorch-dev\n",
                                    script=script, may_call=("apt-get",))

    def test_a_cmake_that_is_too_old(self):
        self.pretend("cmake", "echo 'cmake version 3.24.9'")
        self.become(root=True)
        self.assert_refuses("cmake 3.25 or newer", "3.24.9")

    def test_a_package_that_was_removed_but_not_purged(self):
        self.pretend("dpkg-query", "for p; do :; done; [ $p = g++ ] && printf config-files || printf installed")
        self.assert_refuses("\n  g++\n", may_call=("sudo",))

    def test_nothing_is_asked_of_the_network_when_all_is_there(self):
        for script in SCRIPTS:
            with self.subTest(script):
                done = self.run_script(script)
                self.assertIn("packages: all", done.stdout)
                self.assertTrue(done.calls[0].startswith("cmake --preset release"), done.calls)
                self.assertEqual([], [call for call in done.calls if call.startswith(("sudo", "apt-get"))])

    def test_missing_packages_are_installed_as_root_or_with_sudo(self):
        deliver = f'[ "$4" = update ] || touch "{self.folder}/delivered"'
        for root in (True, False):
            with self.subTest(root=root):
                (self.folder / "delivered").unlink(missing_ok=True)
                self.become(root)
                self.pretend("sudo", 'shift; "$@"')
                self.pretend("apt-get", deliver)
                self.pretend("dpkg-query", "for p; do :; done; "
                             f'[ $p != libtorch-dev ] || [ -e "{self.folder}/delivered" ] && printf installed')
                done = self.run_script("tests/run.sh")
                installs = [call for call in done.calls if call.startswith("apt-get") and "install" in call.split()]
                self.assertEqual(1, len(installs), done.stdout)
                self.assertTrue(installs[0].endswith(" libtorch-dev"), installs)
                self.assertIn("packages: all", done.stdout)

    def test_packages_installed_by_hand(self):
        self.pretend("dpkg-query", "exit 1")
        done = self.run_script("tests/run.sh", HOLDFAST_SKIP_PACKAGES="1")
        self.assertTrue(done.calls[0].startswith("cmake --preset release"), done.calls)

    def test_a_failed_build_is_not_run(self):
        self.pretend("cmake", 'case "$*" in --version) echo cmake version 3.25.1;; --build*) exit 2;; esac')
        for script in SCRIPTS:
            with self.subTest(script):
                done = self.run_script(script)
                self.assertEqual(2, done.returncode, done.stdout)
                self.assertEqual([], [call for call in done.calls if call.startswith(("ctest", "mpirun"))])

    def test_the_tests_end_with_ctests_closing_line_and_its_exit_status(self):
        for status, said in ((0, "100% tests passed, 0 tests failed out of 12"),
                             (8, "91% tests passed, 1 tests failed out of 12")):
            with self.subTest(status):
                self.pretend("ctest", f'echo "{said}"; echo; echo "Total Test time (real) = 1 sec"; exit {status}')
                done = self.run_script("tests/run.sh")
                self.assertEqual(status, done.returncode, done.stdout)
                closing, statement = done.stdout.splitlines()[-2:]
                self.assertEqual(said, closing)
                self.assertTrue(statement.startswith("Tests passed" if status == 0 else "Tests FAILED"), statement)


if __name__ == "__main__":
    unittest.main()
