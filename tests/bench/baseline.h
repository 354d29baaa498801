// What the carrier itself can do: a peer process that echoes, takes in and sends bytes over a unix
// or TCP connection or a ring in shared memory, with nothing of gpupool in between.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gpupool::bench {

enum class Carrier { kUnix, kTcp, kRing };

// One end of a connection: all bytes or the end of the program.
class Pipe {
 public:
  virtual ~Pipe() = default;
  virtual void send(const void* data, size_t bytes) = 0;
  // At least one byte, at most so many; 0: the peer has gone.
  virtual size_t receive_some(void* data, size_t bytes) = 0;
  // Waits for something to receive and leaves the processor to what is measured; false: the peer
  // has gone.
  virtual bool await() { return true; }
};

class RawPeer {
 public:
  explicit RawPeer(Carrier carrier);  // ends the program with a sentence when it can't be set up
  // A ring in a file that another machine maps, too, where serve_region() answers.
  explicit RawPeer(const char* region);
  ~RawPeer();
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // Seconds of each of `count` round trips of `bytes` each way.
  std::vector<double> ping_pong(int count, size_t bytes);
  // Seconds to send `count` times `bytes` to a receiver that copies each chunk once; ends with an
  // acknowledgement of the whole.
  double send_stream(const char* data, size_t bytes, int count);
  // Seconds for `count` times: ask, then receive `bytes`, copying each chunk once to `target`.
  double receive(char* target, size_t bytes, int count);

 private:
  std::unique_ptr<Pipe> pipe_;
  pid_t process_ = -1;
};

// The other side of RawPeer(region): answers until the process is ended. Ends the program with a
// sentence if the file is too small.
[[noreturn]] void serve_region(const char* region);

}  // namespace gpupool::bench
