// Listening sockets, with errors that say what to do and the broker's exit status.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "broker/fd.h"

namespace gpupool::broker {

enum ExitStatus : int { kExitUsage = 2, kExitDisk = 4, kExitSocket = 5 };

// The broker cannot start; main prints the sentence and exits with the status.
struct StartError : std::runtime_error {
  StartError(ExitStatus status, const std::string& sentence)
      : std::runtime_error(sentence), status(status) {}
  ExitStatus status;
};

// Holds <run_dir>/broker.lock for the life of the process, so that there is one broker per
// directory and a socket file found there is a stale one. Makes the directory. Throws StartError.
Fd lock_run_directory(const std::string& run_dir);

// Listens on a unix socket, over a stale one if need be. `type`: SOCK_STREAM or SOCK_SEQPACKET.
// Throws StartError.
Fd listen_unix(const std::string& path, int type, unsigned mode);

// Listens on a stream socket `name` in an open directory that only the broker writes to, in place
// of what is there; `path` is the directory's for errors. Throws StartError.
Fd listen_in(int directory, const char* name, const std::string& path, unsigned mode);

// Listens on "ADDRESS:PORT" or "[ADDRESS]:PORT", which has to be a loopback address where what
// travels is not encrypted. No descriptor: `why` is one sentence about the option.
Fd listen_tcp(const std::string& address, const std::string& option, bool loopback_only,
              std::string* bound, std::string* why);

// uid and pid of the process at the other end of a unix socket; false: not a unix socket.
bool peer_of(int fd, uint32_t* uid, uint32_t* pid);

// The address at the other end of a TCP connection, without the port; "?": it has gone.
std::string address_of(int fd);

}  // namespace gpupool::broker
