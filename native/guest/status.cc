#include "guest/status.h"

#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "broker/fd.h"
#include "guest/helper.h"

namespace gpupool::guest {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxAnswer = 64 * 1024;
constexpr int kPatienceSeconds = 5;

// What the helper says; discarded: it doesn't.
Json ask(const std::string& path) {
  const Json nothing(Json::value_t::discarded);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return nothing;
  path.copy(address.sun_path, path.size());
  const broker::Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{kPatienceSeconds, 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (!fd || connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    return nothing;
  }
  std::string text;
  char chunk[4096];
  ssize_t got;
  while ((got = recv(fd.get(), chunk, sizeof chunk, 0)) > 0 && text.size() < kMaxAnswer) {
    text.append(chunk, static_cast<size_t>(got));
  }
  Json answer = Json::parse(text, nullptr, false);
  return answer.is_object() ? answer : nothing;
}

std::string user_name() {
  const passwd* found = getpwuid(geteuid());
  return found != nullptr ? found->pw_name : std::to_string(geteuid());
}

StatusExit exit_of(const std::string& state) {
  if (state == "ok") return kStatusOk;
  if (state == "no-port" || state == "port-failed") return kStatusNoPort;
  return state == "refused" ? kStatusRefused : kStatusNoHost;
}

// What there is, from the host's words; a slice that cannot be used goes into `problem`.
std::string name_slices(const Json& slices, std::string* problem) {
  std::string text;
  for (const Json& slice : slices) {
    if (!slice.is_object()) continue;
    const std::string name = slice.value("name", "?");
    if (slice.contains("problem")) {
      *problem = "no GPU: slice " + name + ": " + slice.value("problem", "?");
    }
    if (!text.empty()) text += "; ";
    text += "slice " + name + ", " + std::to_string(slice.value("memory_mib", 0ull)) + " MiB, " +
            std::to_string(slice.value("compute_percent", 0u)) + " % of a GPU";
  }
  return text;
}

}  // namespace

int print_status(const std::string& run_dir, bool json) {
  Json status = ask(run_dir + kStatusName);
  int result = kStatusNoHelper;
  if (status.is_discarded()) {
    status =
        Json{{"state", "no-helper"},
             {"sentence", "no GPU: the helper is not running (systemctl status gpupool-guest)"}};
  } else {
    result = exit_of(status.value("state", ""));
  }
  if (result == kStatusOk) {
    std::string problem;
    const std::string slices = name_slices(status.value("slices", Json::array()), &problem);
    status["sentence"] = "GPU: " + slices;
    const Json region = status.value("region", Json::object());
    const std::string state = region.value("state", "");
    if (state == "slow" || state == "failed") {
      status["sentence"] =
          "GPU: " + slices + "; slower than it could be: " + region.value("sentence", "?");
    }
    if (!problem.empty() || slices.empty()) {
      result = kStatusRefused;
      status["state"] = "refused";
      status["sentence"] = problem.empty() ? "no GPU: the host names no slice" : problem;
    }
  }
  const std::string socket = run_dir + kSocketName;
  if (result == kStatusOk && faccessat(AT_FDCWD, socket.c_str(), W_OK, AT_EACCESS) != 0) {
    result = kStatusNotPermitted;
    status["state"] = "not-permitted";
    status["sentence"] = "no GPU for user " + user_name() +
                         ", who is not in the group gpupool: usermod -aG gpupool " + user_name() +
                         ", and log in again";
  }
  status["exit_status"] = result;
  const std::string text = json ? status.dump(2, ' ', false, Json::error_handler_t::replace)
                                : status.value("sentence", "");
  puts(text.c_str());
  return result;
}

}  // namespace gpupool::guest
