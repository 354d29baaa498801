#include "broker/own_directory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/posix_acl.h>
#include <linux/posix_acl_xattr.h>
#include <string.h>
#include <sys/xattr.h>

#include <array>
#include <stdexcept>
#include <vector>

namespace gpupool::broker {
namespace {

constexpr int kDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr char kAccessList[] = "system.posix_acl_access";
constexpr uint32_t kNoId = static_cast<uint32_t>(ACL_UNDEFINED_ID);
constexpr char kDefaultList[] = "system.posix_acl_default";
// A user can have left more than is removed between two events; the rest goes the next time.
constexpr int kMaxDepth = 16;
constexpr int kMaxEntries = 10000;

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + strerror(error));
}

void remove_list(int directory, const char* name, const std::string& path) {
  if (fremovexattr(directory, name) != 0 && errno != ENODATA && errno != EOPNOTSUPP) {
    fail(path + ": " + name, errno);
  }
}

// After this only the broker's user may change anything in it, also through descriptors of others.
void take_over(int directory, const std::string& path) {
  struct stat status;
  if (fstat(directory, &status) != 0) fail(path, errno);
  if (status.st_uid != geteuid()) {
    if (fchown(directory, geteuid(), getegid()) != 0) {
      fail(path + " belongs to user " + std::to_string(status.st_uid), errno);
    }
    if (fchmod(directory, 0700) != 0) fail(path, errno);
  }
  // What is made in it would inherit this one.
  remove_list(directory, kDefaultList, path);
}

void let_pass(int directory, uid_t user, const std::string& path) {
  struct {
    posix_acl_xattr_header header;
    std::array<posix_acl_xattr_entry, 5> entries;
  } list = {{POSIX_ACL_XATTR_VERSION},
            {{{ACL_USER_OBJ, ACL_READ | ACL_WRITE | ACL_EXECUTE, kNoId},
              {ACL_USER, ACL_EXECUTE, user},
              {ACL_GROUP_OBJ, 0, kNoId},
              {ACL_MASK, ACL_EXECUTE, kNoId},
              {ACL_OTHER, 0, kNoId}}}};
  static_assert(sizeof list == 44, "as the kernel reads it");
  if (fsetxattr(directory, kAccessList, &list, sizeof list, 0) != 0) {
    fail("user " + std::to_string(user) + " alone cannot be let into " + path +
             " by an access control list",
         errno);
  }
}

std::vector<std::string> names_in(int directory, const std::string& path) {
  Fd copy(openat(directory, ".", kDirectory));  // a position of its own
  DIR* listing = copy ? fdopendir(copy.get()) : nullptr;
  if (listing == nullptr) fail(path, errno);
  copy.release();
  std::vector<std::string> names;
  while (const dirent* entry = readdir(listing)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    if (names.size() > kMaxEntries) break;
  }
  closedir(listing);
  return names;
}

using Keep = std::function<bool(const std::string&, const struct stat&)>;

void remove_entries(int directory, const std::string& path, const Keep& keep, int depth, int* left);

void remove_entry(int directory, const std::string& name, const std::string& path, int depth,
                  int* left) {
  if (unlinkat(directory, name.c_str(), 0) == 0) return;
  if (errno != EISDIR) fail("cannot remove " + path, errno);
  {
    const Fd inner(openat(directory, name.c_str(), kDirectory));
    struct stat own, status;
    if (!inner || fstat(directory, &own) != 0 || fstat(inner.get(), &status) != 0)
      fail(path, errno);
    if (status.st_dev != own.st_dev) throw std::runtime_error(path + " is a mount: unmount it");
    take_over(inner.get(), path);
    remove_entries(
        inner.get(), path, [](const auto&, const auto&) { return false; }, depth + 1, left);
  }
  if (unlinkat(directory, name.c_str(), AT_REMOVEDIR) != 0) fail("cannot remove " + path, errno);
}

// One that cannot be removed does not keep the others.
void remove_entries(int directory, const std::string& path, const Keep& keep, int depth,
                    int* left) {
  std::string problem;
  for (const std::string& name : names_in(directory, path)) {
    struct stat status;
    if (fstatat(directory, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      fail(path + "/" + name, errno);
    }
    if (keep(name, status)) continue;
    if (--*left < 0 || depth > kMaxDepth) {
      throw std::runtime_error(path + " holds more than can be removed: remove it");
    }
    try {
      remove_entry(directory, name, path + "/" + name, depth, left);
    } catch (const std::runtime_error& error) {
      if (problem.empty()) problem = error.what();
    }
  }
  if (!problem.empty()) throw std::runtime_error(problem);
}

}  // namespace

Fd own_directory(int at, const char* name, const std::string& path, mode_t mode,
                 std::optional<uid_t> passes) {
  if (mkdirat(at, name, 0700) != 0 && errno != EEXIST) fail(path, errno);
  Fd directory(openat(at, name, kDirectory));
  if (!directory) fail(path, errno);
  take_over(directory.get(), path);
  if (passes && *passes != geteuid()) {
    let_pass(directory.get(), *passes, path);
    return directory;
  }
  remove_list(directory.get(), kAccessList, path);
  struct stat status;
  if (fstat(directory.get(), &status) != 0) fail(path, errno);
  if ((status.st_mode & 07777) != mode && fchmod(directory.get(), mode) != 0) fail(path, errno);
  return directory;
}

void remove_entries(int directory, const std::string& path, const Keep& keep) {
  int left = kMaxEntries;
  remove_entries(directory, path, keep, 0, &left);
}

}  // namespace gpupool::broker
