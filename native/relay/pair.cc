#include "relay/pair.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "relay/forward.h"

namespace gpupool::relay {
namespace {

// SIGTERM is blocked in all threads; this one waits for it.
class Terminator {
 public:
  explicit Terminator(carriers::Carrier& carrier)
      : thread_([this, &carrier] {
          sigset_t wanted;
          sigemptyset(&wanted);
          sigaddset(&wanted, SIGTERM);
          sigaddset(&wanted, SIGUSR1);
          int signal = 0;
          while (!over_.load()) {
            if (sigwait(&wanted, &signal) == 0 && signal == SIGTERM) carrier.shutdown();
          }
        }) {}
  ~Terminator() {
    over_ = true;
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace

PairEnd run_pair(carriers::Carrier& carrier, uint32_t carrier_epoch, Link& link,
                 uint32_t link_epoch, const PairEvents& events) {
  PairEnd end;
  Forwarder out(carrier, carrier_epoch, link, link_epoch);
  Forwarder in(link, link_epoch, carrier, carrier_epoch, [&link] { link.pump(); });
  const Terminator terminator(carrier);
  std::atomic<bool> carrier_ended{false};
  Forwarder::End out_end{};
  std::thread outward([&] {
    out_end = out.run();
    if (out_end == Forwarder::End::kToClosed) return;
    carrier_ended = true;
    link.say_goodbye(out_end == Forwarder::End::kBadFrame ? out.problem() : events.last_word());
    link.shutdown();
  });
  const Forwarder::End in_end = in.run();
  end.between = in.between_frames();
  end.sequence = in.sequence();
  end.by_link = in_end == Forwarder::End::kBadFrame ||
                (in_end == Forwarder::End::kFromClosed && !carrier_ended);
  if (end.by_link) {
    end.sentence = in_end == Forwarder::End::kBadFrame
                       ? "the other host's relay sent what is wrong: " + in.problem()
                       : link.ending();
    link.shutdown();
    events.on_link_end(end);
    carrier.shutdown();
  }
  outward.join();
  if (!end.by_link) {
    end.fault = out_end == Forwarder::End::kBadFrame;
    end.sentence = end.fault ? out.problem() : "the client closed the connection";
  }
  return end;
}

}  // namespace gpupool::relay
