// <run_dir>/broker.sock, where gpupoold pushes its state and hears what is going on.
#pragma once

#include <deque>
#include <functional>
#include <string>

#include "broker.pb.h"
#include "broker/fd.h"
#include "broker/loop.h"

namespace gpupool::broker {

class ControlSocket {
 public:
  struct Callbacks {
    std::function<void()> on_connect;
    std::function<void()> on_disconnect;
    std::function<void(const ToBroker&)> on_message;
  };
  ControlSocket(EventLoop& loop, Fd listener, Callbacks callbacks);
  ~ControlSocket();

  bool send(const FromBroker& message);  // false: nobody is connected, or he does not read

 private:
  void on_knock();
  void on_event(uint32_t events);
  void flush();
  void close();

  EventLoop& loop_;
  Fd listener_;
  Callbacks callbacks_;
  Fd peer_;
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
  EventLoop::TimerId closing_ = 0;
};

}  // namespace gpupool::broker
