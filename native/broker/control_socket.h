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
    std::function<void()> on_writable;  // after send_event() had to say no
  };
  ControlSocket(EventLoop& loop, Fd listener, Callbacks callbacks);
  ~ControlSocket();

  // For what was asked: it goes ahead of all events. False: nobody is connected, or he does not
  // read, which ends the connection.
  bool send(const FromBroker& message);
  // Sends now or not at all. False: on_writable() tells when to try again.
  bool send_event(const FromBroker& message);

 private:
  void on_knock();
  void on_event(uint32_t events);
  bool send_now(const std::string& packet);
  void flush();
  void watch();
  void close();

  EventLoop& loop_;
  Fd listener_;
  Callbacks callbacks_;
  Fd peer_;
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
  bool event_waits_ = false;
  EventLoop::TimerId closing_ = 0;
};

}  // namespace gpupool::broker
