#include "worker/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <linux/close_range.h>
#include <linux/magic.h>
#include <pwd.h>
#include <seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>

#include "worker/channel.h"

namespace gpupool::worker {
namespace {

bool fail(std::string* why, const std::string& what) {
  *why = what + ": " + strerror(errno);
  return false;
}

// By name, so that a kernel or libseccomp that lacks one is no error.
constexpr const char* kDenied[] = {
    // Other processes.
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "kcmp",
    "process_madvise",
    "pidfd_send_signal",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    // Programs: a worker never becomes another one.
    "execve",
    "execveat",
    // File systems and namespaces.
    "mount",
    "umount2",
    "umount",
    "pivot_root",
    "chroot",
    "unshare",
    "setns",
    "mount_setattr",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "name_to_handle_at",
    "open_by_handle_at",
    "quotactl",
    "quotactl_fd",
    "swapon",
    "swapoff",
    "fanotify_init",
    "acct",
    // The kernel.
    "bpf",
    "kexec_load",
    "kexec_file_load",
    "init_module",
    "finit_module",
    "delete_module",
    "create_module",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "reboot",
    "syslog",
    "iopl",
    "ioperm",
    "modify_ldt",
    "vhangup",
    "lookup_dcookie",
    "nfsservctl",
    "uselib",
    "ustat",
    "sysfs",
    "_sysctl",
    "vm86",
    "vm86old",
    // Keys, time and names of the host.
    "keyctl",
    "add_key",
    "request_key",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
    "stime",
    "sethostname",
    "setdomainname",
    // Identity: what was dropped stays dropped.
    "setuid",
    "setgid",
    "setreuid",
    "setregid",
    "setresuid",
    "setresgid",
    "setgroups",
    "setfsuid",
    "setfsgid",
    "capset",
    "personality",
};

}  // namespace

bool confine_process(pid_t broker, std::string* why) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return fail(why, "prctl(PR_SET_PDEATHSIG)");
  if (broker != 0 && getppid() != broker) return *why = "the broker is gone", false;
  if (close_range(kChannelFd + 1, ~0u, 0) != 0) return fail(why, "close_range");
  const rlimit none{0, 0};
  if (setrlimit(RLIMIT_CORE, &none) != 0) return fail(why, "setrlimit(RLIMIT_CORE)");
  rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max = std::min<rlim_t>(files.rlim_max, 65536);
    setrlimit(RLIMIT_NOFILE, &files);
  }
  // If the host runs out of memory nevertheless, a worker goes before what runs all of them.
  const int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (score >= 0) {
    if (write(score, "500", 3) != 3) return fail(why, "/proc/self/oom_score_adj");
    close(score);
  }
  if (chdir("/") != 0) return fail(why, "chdir(\"/\")");
  umask(0077);
  return true;
}

bool enter_cgroup(const std::string& parent, std::string* why) {
  struct statfs file_system;
  if (statfs(parent.c_str(), &file_system) != 0) return fail(why, parent);
  if (file_system.f_type != CGROUP2_SUPER_MAGIC) return *why = parent + " is no cgroup v2", false;
  const std::string own = parent + "/worker-" + std::to_string(getpid());
  if (mkdir(own.c_str(), 0755) != 0 && errno != EEXIST) return fail(why, own);
  const int fd = open((own + "/cgroup.procs").c_str(), O_WRONLY | O_CLOEXEC);
  const bool moved = fd >= 0 && write(fd, "0", 1) == 1;
  if (!moved) fail(why, own + "/cgroup.procs");
  if (fd >= 0) close(fd);
  return moved;
}

bool drop_privileges(const std::string& user, std::string* why) {
  if (geteuid() == 0 && !user.empty()) {
    errno = 0;
    const passwd* entry = getpwnam(user.c_str());
    if (entry == nullptr) return *why = "the worker user " + user + " does not exist", false;
    const uid_t uid = entry->pw_uid;
    const gid_t gid = entry->pw_gid;
    if (initgroups(user.c_str(), gid) != 0) return fail(why, "initgroups");
    if (setresgid(gid, gid, gid) != 0) return fail(why, "setresgid");
    if (setresuid(uid, uid, uid) != 0) return fail(why, "setresuid");
    if (uid != 0 && setuid(0) == 0) return *why = "privileges came back after setresuid", false;
    // A change of identity clears it.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return fail(why, "prctl(PR_SET_PDEATHSIG)");
  }
  // Workers of different tenants have the same user: none may look into another one.
  if (prctl(PR_SET_DUMPABLE, 0) != 0) return fail(why, "prctl(PR_SET_DUMPABLE)");
  return true;
}

DataLimit::DataLimit(uint64_t host_bytes) {
  constexpr uint64_t kStacks = 2ull << 30;  // threads' stacks are reserved as a whole
  FILE* status = fopen("/proc/self/status", "re");
  if (status == nullptr) return;
  char line[256];
  uint64_t kib = 0;
  while (fgets(line, sizeof line, status) != nullptr) {
    if (sscanf(line, "VmData: %" SCNu64 " kB", &kib) == 1)
      base_ = kib * 1024 + host_bytes + kStacks;
  }
  fclose(status);
}

void DataLimit::allow(uint64_t slice_bytes) const {
  rlimit limit;
  if (base_ == 0 || getrlimit(RLIMIT_DATA, &limit) != 0) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, base_ + slice_bytes);
  setrlimit(RLIMIT_DATA, &limit);
}

bool deny_system_calls(std::string* why) {
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return fail(why, "prctl(PR_SET_NO_NEW_PRIVS)");
  scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
  if (filter == nullptr) return *why = "seccomp_init failed", false;
  const auto failed = [&](const char* what, int error) {
    seccomp_release(filter);
    *why = std::string(what) + ": " + strerror(-error);
    return false;
  };
  for (const char* name : kDenied) {
    const int number = seccomp_syscall_resolve_name(name);
    if (number == __NR_SCMP_ERROR) continue;
    const int error = seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), number, 0);
    // Calls of other architectures cannot be expressed, nor be made.
    if (error != 0 && error != -EDOM && error != -EINVAL) return failed(name, error);
  }
  // Signals to other processes; 0 only asks whether a process lives.
  const auto self = static_cast<scmp_datum_t>(getpid());
  for (int number : {SCMP_SYS(kill), SCMP_SYS(tgkill), SCMP_SYS(tkill)}) {
    const unsigned signal = number == SCMP_SYS(tgkill) ? 2 : 1;
    if (number == SCMP_SYS(tkill)) continue;  // thread ids: checked by nobody, used by nobody
    const int error =
        seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), number, 2, SCMP_A0(SCMP_CMP_NE, self),
                         scmp_arg_cmp{signal, SCMP_CMP_NE, 0, 0});
    if (error != 0) return failed("seccomp rule for kill", error);
  }
  if (int error = seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(tkill), 0)) {
    return failed("seccomp rule for tkill", error);
  }
  if (int error = seccomp_attr_set(filter, SCMP_FLTATR_CTL_TSYNC, 1)) {
    return failed("seccomp TSYNC", error);
  }
  if (int error = seccomp_load(filter)) return failed("seccomp_load", error);
  seccomp_release(filter);
  return true;
}

}  // namespace gpupool::worker
