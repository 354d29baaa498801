// What a worker may not do any more; each test in a process of its own, since there is no way back.
#include "worker/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>

namespace gpupool::worker {
namespace {

// Runs `body` in a child; it returns an empty text, or what is wrong.
std::string in_child(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) return "pipe";
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    const std::string wrong = body();
    if (!wrong.empty() && write(ends[1], wrong.data(), wrong.size()) < 0) _exit(2);
    _exit(wrong.empty() ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char chunk[256];
  ssize_t got;
  while ((got = read(ends[0], chunk, sizeof chunk)) > 0) text.append(chunk, got);
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  if (status != 0 && text.empty()) text = "status " + std::to_string(status);
  return text;
}

template <typename... Arguments>
bool denied(long number, Arguments... arguments) {
  errno = 0;
  return syscall(number, arguments...) == -1 && errno == EPERM;
}

TEST(Confine, DeniesSystemCalls) {
  EXPECT_EQ(in_child([]() -> std::string {
              const pid_t other = fork();
              if (other == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody else may end it, in a moment
                pause();
                _exit(0);
              }
              std::string why;
              std::thread early([&] { usleep(100000); });  // the filter is for all threads
              if (!deny_system_calls(&why)) return why;
              char* argv[] = {const_cast<char*>("/bin/true"), nullptr};
              if (execv(argv[0], argv) != -1 || errno != EPERM) return "execve";
              if (!denied(SYS_ptrace, PTRACE_ATTACH, other, 0, 0)) return "ptrace";
              if (!denied(SYS_process_vm_readv, other, 0, 0, 0, 0, 0)) return "process_vm_readv";
              if (!denied(SYS_mount, "none", "/tmp", "tmpfs", 0, 0)) return "mount";
              if (!denied(SYS_bpf, 0, 0, 0)) return "bpf";
              if (!denied(SYS_keyctl, 0, 0, 0, 0, 0)) return "keyctl";
              if (!denied(SYS_unshare, 0x10000000)) return "unshare";
              if (!denied(SYS_init_module, 0, 0, "")) return "init_module";
              if (!denied(SYS_kexec_load, 0, 0, 0, 0)) return "kexec_load";
              if (!denied(SYS_kill, other, SIGKILL)) return "kill";
              if (!denied(SYS_tgkill, other, other, SIGKILL)) return "tgkill";
              if (!denied(SYS_tkill, other, SIGKILL)) return "tkill";
              // What a driver and a crash need goes on working.
              if (kill(other, 0) != 0) return "kill 0";
              if (kill(getpid(), SIGCONT) != 0) return "kill oneself";
              bool ran = false;
              std::thread([&] { ran = true; }).join();
              if (!ran) return "threads";
              early.join();
              if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1) return "no_new_privs";
              return "";
            }),
            "");
}

TEST(Confine, AbortStillEndsTheProcess) {
  EXPECT_EQ(in_child([]() -> std::string {
              std::string why;
              if (!deny_system_calls(&why)) return why;
              signal(SIGABRT, SIG_DFL);
              abort();
            }),
            "status " + std::to_string(SIGABRT));
}

TEST(Confine, ClosesDescriptorsAndWritesNoCore) {
  EXPECT_EQ(in_child([]() -> std::string {
              // 3 is the channel; the test's own pipe would be closed, so it moves there.
              for (int fd = 4; fd < 40; fd++) {
                if (fcntl(fd, F_GETFD) != -1) dup2(fd, 3);
              }
              const int stray = fcntl(0, F_DUPFD, 100);
              std::string why;
              if (!confine_process(getppid(), &why)) return why;
              if (fcntl(stray, F_GETFD) != -1) return "a descriptor is still open";
              rlimit core;
              getrlimit(RLIMIT_CORE, &core);
              if (core.rlim_max != 0) return "core dumps";
              int signal = 0;
              prctl(PR_GET_PDEATHSIG, &signal);
              return signal == SIGKILL ? "" : "outlives the broker";
            }),
            "");
}

TEST(Confine, EndsWhenTheBrokerIsGoneAlready) {
  EXPECT_EQ(in_child([]() -> std::string {
              std::string why;
              return confine_process(getpid(), &why) ? "it went on" : "";
            }),
            "");
}

TEST(Confine, DropsPrivileges) {
  if (geteuid() != 0) GTEST_SKIP() << "not root";
  EXPECT_EQ(in_child([]() -> std::string {
              std::string why;
              if (!drop_privileges("nobody", &why)) return why;
              uid_t real, effective, saved;
              getresuid(&real, &effective, &saved);
              const uid_t nobody = getpwnam("nobody")->pw_uid;
              if (real != nobody || effective != nobody || saved != nobody) return "uid";
              if (getgroups(0, nullptr) > 1) return "groups";
              if (setuid(0) == 0) return "came back";
              int signal = 0;
              prctl(PR_GET_PDEATHSIG, &signal);
              if (signal != SIGKILL) return "outlives the broker";
              return prctl(PR_GET_DUMPABLE) == 0 ? "" : "dumpable";
            }),
            "");
}

TEST(Confine, NamesAUserThatDoesNotExist) {
  if (geteuid() != 0) GTEST_SKIP() << "not root";
  EXPECT_EQ(in_child([]() -> std::string {
              std::string why;
              if (drop_privileges("no-such-user-here", &why)) return "it went on";
              return why.find("no-such-user-here") != std::string::npos ? "" : why;
            }),
            "");
}

TEST(Confine, SaysWhyThereIsNoCgroup) {
  std::string why;
  EXPECT_FALSE(enter_cgroup("/tmp", &why));
  EXPECT_EQ(why, "/tmp is no cgroup v2");
  EXPECT_FALSE(enter_cgroup("/no/such/directory", &why));
  EXPECT_NE(why.find("/no/such/directory"), std::string::npos);
}

}  // namespace
}  // namespace gpupool::worker
