// Carries many connections over one byte stream, a port of a virtual machine: the same code on the
// host and in the guest. Each channel has a socket at either end and credit of its own, so that one
// whose socket is not read keeps none of the others waiting. What comes from the other side is
// checked before it is used; something wrong ends the channels, and both sides begin anew.
//
// One thread, no blocking: the owner watches fd() for reading and calls run(). SIGPIPE has to be
// ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "carriers/mux_format.h"

namespace gpupool::carriers {

// Called from run() and the other methods; must not destroy the Mux.
class MuxOwner {
 public:
  virtual ~MuxOwner() = default;
  // Host: a guest opens a channel. The channel's end of a new stream socket, which the Mux owns
  // from then on, or -1 and a sentence.
  virtual int on_open(std::string* why) = 0;
  // Both sides know each other from now on.
  virtual void on_up() {}
  // They do no more, and all channels have ended. `fault`: the other side did something wrong.
  virtual void on_down(const std::string& why, bool fault) = 0;
  // Guest: the host speaks no version that this side knows.
  virtual void on_refused(const std::string& why) { (void)why; }
  // A channel ends before its time; its socket is closed afterwards. Not `accepted`: nothing of the
  // host's was written to it.
  virtual void on_close(int fd, bool accepted, const std::string& why) {
    (void)fd, (void)accepted, (void)why;
  }
  // Guest: a descriptor that goes along with the first bytes to a channel's socket; -1: none.
  virtual int descriptor() { return -1; }
  // Guest: what the host tells about the lease.
  virtual void on_info(std::string_view json) { (void)json; }
};

class Mux {
 public:
  enum class Side { kHost, kGuest };
  static constexpr size_t kMaxChannels = 640;

  // `port`: the stream, made non-blocking; stays the owner's, and open as long as the Mux lives.
  // Throws std::system_error.
  Mux(Side side, int port, MuxOwner& owner, size_t max_channels = kMaxChannels);
  ~Mux();
  Mux(const Mux&) = delete;
  Mux& operator=(const Mux&) = delete;

  int fd() const { return main_; }
  // Does what can be done now, a bounded part of it. False: the port hung up.
  bool run();

  // Guest: a new channel for a connected stream socket, which the Mux owns from then on. False:
  // `why` is a sentence, and the socket is still the caller's.
  bool open(int fd, std::string* why);
  // Guest: asks again, in case the hello was lost. Does nothing when it is up or was refused.
  void ask_again();
  // Host: sent now and at each on_up().
  void set_info(std::string json);
  // Ends all channels, and tells the other side so as far as the port takes it at once.
  void end_channels(const std::string& why);

  bool up() const { return up_; }
  size_t channels() const { return channels_.size(); }
  // Bytes that are kept for both directions.
  size_t buffered() const;

 private:
  // Bytes that are put in at the end and taken from the front.
  class Queue {
   public:
    size_t size() const { return end_ - begin_; }
    bool empty() const { return begin_ == end_; }
    const uint8_t* front() const { return data_.get() + begin_; }
    uint8_t* room(size_t bytes);                 // at the end, uninitialised
    void added(size_t bytes) { end_ += bytes; }  // of the room
    void append(const void* data, size_t bytes);
    void take(size_t bytes);

   private:
    std::unique_ptr<uint8_t[]> data_;
    size_t begin_ = 0, end_ = 0, capacity_ = 0;
  };

  struct Channel {
    uint32_t id = 0;
    int fd = -1;
    bool accepted = false;
    bool greeted = false;  // the descriptor went with the first bytes
    // From the other side to the socket.
    Queue pending;
    uint64_t received = 0, delivered = 0;
    uint64_t granted = kMuxFirstCredit;
    bool peer_ended = false;  // it sends no more
    bool closing = false;     // and wants no more: over when `pending` is delivered
    bool credit_due = false;
    bool watching_sink = false;
    // From the socket to the other side.
    uint64_t sent = 0;
    uint64_t credit = kMuxFirstCredit;
    bool ended = false;
    bool watching_source = false;
  };

  // The port is not read while more than this waits for it. Only somebody who sends and never reads
  // lets that much gather: without it there is data and at most a few small frames per channel.
  static constexpr size_t kOutMost = 1 << 20;
  // What epoll says; channels' tags follow.
  static constexpr uint64_t kPortTag = 0, kSourcesTag = 1, kAgainTag = UINT64_MAX;
  static constexpr uint64_t tag_of(uint32_t channel) { return uint64_t{channel} + 1; }
  static bool watch(int epoll, int operation, int fd, uint32_t events, uint64_t tag);

  void read_port();
  bool is_gone() const;
  void come_again();
  void parse();
  bool find_hello();  // false: more has to be read
  bool take_frame(const MuxHeader& header, const uint8_t* body);
  void take_hello(const MuxHello& hello);
  void take_hello_at_host(const MuxHello& hello);
  void take_hello_at_guest(const MuxHello& hello);
  bool take_open(uint32_t id);
  bool take_data(Channel& channel, const uint8_t* data, size_t bytes);
  bool take_credit(Channel& channel, const uint8_t* body);
  bool bad(const std::string& what);  // always false
  void go_down(const std::string& why, bool fault);

  void begin_epoch();
  void send_hello(uint64_t echo, uint16_t version, std::string_view text);
  void send(MuxKind kind, uint32_t channel, const void* body, size_t bytes);
  void send_close(uint32_t channel, std::string_view why);
  void send_filler();

  void add(uint32_t id, int fd);
  Channel* find(uint32_t id);
  void erase(Channel& channel);
  void abort(Channel& channel, const std::string& why);  // tells the other side
  void drop_all(const std::string& why);                 // does not
  ssize_t put(Channel& channel, const void* data, size_t bytes);
  void deliver(Channel& channel);
  void pull();
  void pull_from(Channel& channel);
  void consider_credit(Channel& channel);
  void send_credits();
  void flush();
  void watch_source(Channel& channel);
  void watch_sink(Channel& channel);
  void watch_port();

  const Side side_;
  const int port_;
  MuxOwner& owner_;
  const size_t max_channels_;
  int main_ = -1;     // the port, sockets that have to take something, and `sources_`
  int sources_ = -1;  // sockets that may be read
  int again_ = -1;    // readable: run() left something undone
  int opens_ = 0;     // channels opened in this run
  bool watching_sources_ = false;
  uint32_t port_events_ = 0;

  Queue in_, out_;
  bool hung_up_ = false;
  bool scanning_ = true;  // the place in the stream is not known
  bool up_ = false;
  bool refused_ = false;
  uint64_t own_epoch_ = 0, peer_epoch_ = 0;
  uint32_t frame_epoch_ = 0;
  uint32_t highest_ = 0;  // channel that was opened in this epoch
  std::string info_;
  std::unordered_map<uint32_t, std::unique_ptr<Channel>> channels_;
  std::deque<uint32_t> credits_due_;
  uint64_t outstanding_ = 0;  // that the other side may send, or that was not delivered yet
};

}  // namespace gpupool::carriers
