// The guest's helper: programs connect to its socket, and each connection becomes a channel of the
// port. One thread.
#pragma once

#include <memory>
#include <string>

#include "broker/loop.h"
#include "carriers/mux.h"
#include "guest/port.h"
#include "guest/region.h"

namespace gpupool::guest {

constexpr uint32_t kVsockPort = 26480;  // [broker] vsock_port, unless set

struct HelperOptions {
  std::string port = kPort;
  uint32_t vsock_port = kVsockPort;  // of the host, where the machine has a vsock device; 0: none
  std::string run_dir = "/run/gpupool";
  std::string group = "gpupool";  // that may use the socket; need not exist
  std::string region;             // memory that is shared with the host; empty: is looked for
  uint64_t region_speed = 100;    // MiB/s that it has to move to be used
};

constexpr char kSocketName[] = "/guest.sock";
constexpr char kStatusName[] = "/guest-status.sock";  // says how things are, as JSON, to everybody

class Helper final : public carriers::MuxOwner {
 public:
  explicit Helper(const HelperOptions& options);  // throws broker::StartError
  ~Helper() override;

  void run();  // until SIGTERM or SIGINT

  // ---- MuxOwner ----
  int on_open(std::string* why) override;
  void on_up() override;
  void on_down(const std::string& why, bool fault) override;
  void on_refused(const std::string& why) override;
  void on_close(int fd, bool accepted, const std::string& why) override;
  void on_info(std::string_view json) override;
  int descriptor() override { return region_.fd(); }

 private:
  bool start_mux(int fd);
  // As `gpupool-guest status` tells them apart.
  enum class State { kNoPort, kPortFailed, kNoHost, kNoAnswer, kRefused, kUp };

  void watch_signals();
  void look_again();
  void tick();
  void run_mux();
  void end_mux();
  void enter(State state, const std::string& why);
  void on_program();
  void on_question();
  std::string sentence() const;
  void look_at_region(bool now);
  std::string region_sentence() const;
  std::string describe() const;

  const HelperOptions options_;
  broker::EventLoop loop_;
  Fd signals_, programs_, questions_;
  Port port_;
  Fd vsock_;  // in place of the port
  Region region_;
  std::unique_ptr<carriers::Mux> mux_;
  broker::EventLoop::TimerId timer_ = 0;
  State state_ = State::kNoPort;
  std::string why_, info_;
};

}  // namespace gpupool::guest
