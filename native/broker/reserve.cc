#include "broker/reserve.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>

namespace gpupool::broker {

Reserve::Reserve() : fd_(open("/dev/null", O_RDONLY | O_CLOEXEC)) {}

bool Reserve::turn_away(int listener, int error) {
  if (error != EMFILE && error != ENFILE) return false;  // nobody there, or he has gone already
  fd_.reset();
  Fd refused(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  refused.reset();
  fd_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
  return true;
}

}  // namespace gpupool::broker
