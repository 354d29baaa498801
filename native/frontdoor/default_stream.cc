#include "frontdoor/default_stream.h"

namespace gpupool::frontdoor {

__thread bool t_per_thread_stream __attribute__((tls_model("initial-exec"))) = false;

}  // namespace gpupool::frontdoor
