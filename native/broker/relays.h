// Where relays of other hosts knock, and the relays here that serve them, one process for each. The
// broker only reads which of them is meant; everything else is behind TLS, which they speak.
#pragma once

#include <array>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "broker/door.h"
#include "broker/fd.h"
#include "broker/loop.h"
#include "broker/reserve.h"
#include "broker/workers.h"
#include "relay/protocol.h"

namespace gpupool::broker {

class RelayTable {
 public:
  RelayTable(EventLoop& loop, Door& door, WorkerPool& workers);
  ~RelayTable();

  // Listens as configured; what came of it goes into `applied`.
  void configure(const RelaySettings& settings, Applied* applied);

 private:
  struct Knock {
    Fd fd;
    std::string address;
    EventLoop::TimerId timer = 0;
    relay::Preamble preamble{};
    size_t got = 0;
  };
  struct Far {
    std::array<uint8_t, 16> id{};
    std::string address;
    Worker* worker = nullptr;
    bool proven = false;  // it has seen the other side's certificate
    EventLoop::TimerId timer = 0;
    std::vector<std::string> hosts;
  };

  void on_knock();
  void make_room(const std::string& address);
  void on_event(Knock& knock);
  void drop(Knock& knock);
  void begin(Knock& knock);
  void resume(Knock& knock);
  void assign(Worker* worker, const std::string& why, const std::shared_ptr<Far>& far,
              const std::shared_ptr<Fd>& fd);
  void on_message(Far& far, worker::Message& message);
  void on_end(const Far& far);
  std::weak_ptr<Far> weak_from(const Far& far) const;

  EventLoop& loop_;
  Door& door_;
  WorkerPool& workers_;
  std::string listen_, bound_, error_;
  Fd listener_;
  Reserve reserve_;
  std::list<Knock> knocks_;  // the oldest first
  std::list<std::shared_ptr<Far>> fars_;
};

}  // namespace gpupool::broker
