// What a session holds, and the few ways in which its operations reach the driver and the client.
// Only the session's own thread uses the tables; waiter threads use the driver and send.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "carriers/carrier.h"
#include "wire/codec.h"
#include "wire/frame_io.h"
#include "wire/messages.h"
#include "worker/bookkeeper.h"
#include "worker/books.h"
#include "worker/driver_table.h"
#include "worker/frames.h"
#include "worker/host_functions.h"
#include "worker/lent_bulk.h"
#include "worker/memory.h"
#include "worker/outgoing.h"
#include "worker/output_capture.h"
#include "worker/session.h"
#include "worker/staging.h"
#include "worker/tables.h"
#include "worker/virtual_memory.h"
#include "worker/waiters.h"

namespace gpupool::worker {

struct Context;

struct Stream {
  CUstream driver = nullptr;
  Context* context = nullptr;
  bool non_blocking = false;  // not ordered with the legacy default stream
  bool busy = false;          // work was submitted since it was last known to be idle
  uint64_t fence_seen = 0;    // Context::fence that its work already comes after
};

struct Event {
  CUevent driver = nullptr;
  uint32_t context = 0;  // wire id
};

struct Module {
  CUmodule driver = nullptr;
  uint32_t context = 0;
  uint64_t charged = 0;
  bool prints = false;         // its code calls printf
  std::vector<uint8_t> image;  // while it is coming in
  uint64_t host_charged = 0;   // for the image
  bool loading = false;
  bool refused = false;  // there is no room for the image: what comes of it is skipped
};

struct Function {
  CUfunction driver = nullptr;
  uint32_t context = 0;
  wire::Handle module;
  bool prints = false;
  uint32_t parameter_bytes = 0;
  bool parameters_known = false;  // by the driver
  bool launched = false;
};

struct Link {
  CUlinkState driver = nullptr;
  uint32_t context = 0;
  bool want_log = false;
  std::vector<uint8_t> input;  // while it is coming in
  uint64_t host_charged = 0;   // for the input
  bool refused = false;        // as a module
  std::unique_ptr<char[]> info_log, error_log;
  // The driver keeps pointers to these until the link is destroyed.
  std::unique_ptr<CUjit_option[]> options;
  std::unique_ptr<void*[]> values;
};

struct GraphExec {
  CUgraphExec driver = nullptr;
  CUgraph graph = nullptr;
  uint32_t context = 0;
  bool prints = false;
  bool unsettled = false;              // what its kernels need was not compared with the books yet
  std::map<uint32_t, uint32_t> fresh;  // functions that its next launch is the first of
  std::vector<CUgraphNode> nodes;      // of the graph, by which the executable's are named
  std::vector<uint32_t> kinds;
  std::vector<uint8_t> description;  // while it, or an update, is coming in
};

// Memory that the driver sets aside for a context as its limit says.
struct LimitCharge {
  uint64_t own = 0;      // the driver's own value, which is the context's
  uint64_t charged = 0;  // what the program asked for beyond it
};

struct Context {
  CUcontext driver = nullptr;
  uint32_t id = 0;  // wire id
  wire::Handle handle;
  bool primary = false;
  bool printing = false;  // a kernel that prints was launched: its output is looked for
  bool sticky_told = false;
  Stream legacy;
  std::vector<Stream*> busy;
  int non_blocking_streams = 0;
  // Copies that have to be over before later work on any stream: streams that are not ordered with
  // the legacy stream wait for the event first.
  uint64_t fence = 0, fence_recorded = 0;
  CUevent fence_event = nullptr;
  std::map<CUlimit, LimitCharge> limits;
};

struct Command {
  uint16_t operation = 0;
  uint8_t flags = 0;
  uint8_t bulk_count = 0;
  uint32_t thread = 0;
  uint32_t context = 0;
  uint64_t call = 0;  // of a command that wants a reply
  uint64_t bulk_bytes = 0;
  wire::Decoder body{nullptr, 0};

  bool wants_reply() const { return (flags & wire::kWantsReply) != 0; }
};

class SessionState final : private Frames::Deputy {
 public:
  SessionState(std::unique_ptr<carriers::Carrier> carrier, const Assignment& assignment,
               Driver& driver, MemoryAccount& account);
  ~SessionState() override;

  SessionOutcome run();
  void stop() { carrier_->shutdown(); }

  // ---- For the operations -----------------------------------------------------------------

  const DriverTable& driver() const { return driver_.table(); }
  Memory& memory() { return memory_; }
  VirtualMemory& virtual_memory() { return virtual_memory_; }
  Waiters& waiters() { return waiters_; }
  Staging& staging() { return staging_; }
  HostFunctions& host_functions() { return host_functions_; }
  const HostFunctions& host_functions() const { return host_functions_; }
  OutgoingCopies& outgoing() { return outgoing_; }
  const Assignment& assignment() const { return assignment_; }
  Books& account() { return account_; }

  // The command's current context; null: it has none, or a wrong one.
  Context* context(const Command& command) { return context_by_id(command.context); }
  Context* context_by_id(uint32_t id);
  Stream* stream(Context* context, wire::Handle handle);
  Event* event(wire::Handle handle) { return events.find(handle); }
  Function* function(wire::Handle handle) { return functions.find(handle); }
  bool device_range(uint64_t address, uint64_t bytes) const {
    return memory_.contains(address, bytes) || virtual_memory_.contains(address, bytes);
  }

  // The gate: every piece of work for the device goes through here, in order. (The compute
  // scheduler will hold it back here.)
  template <typename Call>
  CUresult submit(Context* context, Stream* stream, Call&& call) {
    if (current_ != context) [[unlikely]]
      make_current(context);
    if (stream->non_blocking && stream->fence_seen != context->fence) [[unlikely]] {
      pass_fence(context, stream);
    }
    // What the free waited for may be over by now: later work finds the memory gone, as in CUDA.
    if (!pending_frees_.empty()) [[unlikely]]
      free_ready(false);
    if (!stream->busy) {
      stream->busy = true;
      context->busy.push_back(stream);
    }
    submitted_++;
    return call();
  }
  // A call that is no work for the device.
  template <typename Call>
  CUresult query(Context* context, Call&& call) {
    if (current_ != context) make_current(context);
    return call();
  }

  // The result of a command: a reply if it wants one; else an error is told as an event. All
  // return whether the session goes on.
  bool answer(const Command& command, CUresult result, const void* body = nullptr,
              size_t body_bytes = 0);
  bool malformed(const Command& command);
  bool unknown(const Command& command);
  bool refuse(const std::string& why);

  // Sends one reply; from any thread. `more`: another one follows for the same call.
  bool reply(uint64_t call, CUresult result, const void* body, size_t body_bytes,
             const carriers::Part* bulk = nullptr, int bulk_count = 0, bool more = false);
  // What is to arrive in front of a reply of a call that waited: output, and a sticky error.
  void before_reply(uint32_t context_id, CUresult result, bool printing);
  // What the driver wrote, as events for the client.
  void send_text(wire::EventKind kind, uint32_t context_id, const std::string& text);

  // Copies from the device that are done are sent before whatever tells the client so. A context
  // is current.
  void send_finished_copies();
  // Tells the client that one of its functions is to be called, or (`status` of a refusal) never
  // will be.
  void tell_host_function(uint32_t context, uint32_t number, CUresult status, bool refused);

  // Reads bulk bytes of the current frame, waiting for them. False: the client has gone.
  bool read_bulk(void* to, uint64_t bytes);
  // Whether copies may use a ring's bulk data where they lie: nothing but such copies is under way.
  bool may_lend(Context* context);
  // The next bulk bytes where they lie, to be given back with lent(); null: not in one piece.
  const uint8_t* lend_bulk(uint64_t bytes, uint64_t* end);
  // How many of the next bytes are in one piece, from the client and to it.
  uint64_t bulk_run_in() const { return carrier_->bulk_run_in(); }
  uint64_t bulk_run_out() {
    std::lock_guard guard(send_lock_);
    return carrier_->bulk_run_out();
  }
  void lent(uint64_t end, uint64_t bytes, Context* context, Stream* stream);
  // One piece of a copy from the device, which has nothing else to do, straight to where the
  // client reads it. `copy(void*)` submits it. False in `made`: it was not, for lack of room.
  template <typename Copy>
  bool reply_from_device(uint64_t call, uint64_t bytes, Stream* stream, bool more, bool* made,
                         CUresult* result, Copy&& copy) {
    std::lock_guard guard(send_lock_);
    uint8_t* room = carrier_->bulk_room(bytes);
    *made = room != nullptr;
    if (room == nullptr) return true;
    *result = copy(room);
    if (*result == CUDA_SUCCESS) *result = driver().cuStreamSynchronize(stream->driver);
    if (*result != CUDA_SUCCESS) return true;
    const carriers::Part part{room, bytes};
    const wire::ReplyHeader header{sizeof header,
                                   static_cast<uint16_t>(more ? wire::kMoreFollows : 0),
                                   1,
                                   call,
                                   CUDA_SUCCESS,
                                   0};
    return send(wire::FrameKind::kReplies, &header, sizeof header, &part, 1);
  }
  bool skip_bulk(uint64_t bytes);

  void make_current(Context* context);
  // What every thread that calls the driver does first.
  void enter_on_this_thread(CUcontext context) { driver().cuCtxSetCurrent(context); }

  // True if no stream of the context has work; forgets which had. An error of the driver counts as
  // work, so that the caller's own call meets it.
  bool idle(Context* context);
  // Frees memory that was forgotten, now or when the work before it is done.
  void free_later(Context* context, uint64_t address);
  void free_ready(bool wait);
  void set_fence(Context* context);
  void destroy_context(Context* context);

  Table<Context> contexts;
  Table<Stream> streams;
  Table<Event> events;
  Table<Module> modules;
  Table<Function> functions;
  Table<Link> links;
  Table<GraphExec> graph_execs;
  uint64_t graph_nodes = 0;  // of all executables

  std::atomic<uint64_t> commands_done{0}, launches{0}, bytes_in{0}, bytes_out{0};

 private:
  struct PendingFree {
    uint64_t address;
    CUcontext context;
    std::vector<CUevent> events;  // free when all have happened
  };

  SessionOutcome serve();
  bool take_frame();
  bool execute(const Command& command);
  void pass_fence(Context* context, Stream* stream);
  bool send(wire::FrameKind kind, const void* body, uint32_t bytes, const carriers::Part* bulk,
            int bulk_count);
  void send_event(wire::EventKind kind, uint32_t context, const void* body, size_t bytes);
  void grant_credit();
  bool keep_books();
  bool look_at_books();
  bool work_outstanding();
  std::string ended_why();
  void send_refusal(const std::string& why);  // with send_lock_ held
  uint64_t credit() const {
    return base_credit_.load(std::memory_order_relaxed) + ahead_.load(std::memory_order_relaxed);
  }

  // Of the deputy that reads while functions of the client are outstanding:
  bool needed() override { return host_functions_.outstanding(); }
  uint64_t granted() override { return credit(); }
  bool take_ahead(const wire::FrameHeader& header, const uint8_t* body,
                  const std::vector<uint8_t>& bulk, std::string* why) override;
  void took_ahead(uint64_t bytes) override;
  void closed() override { host_functions_.close(); }

  const std::unique_ptr<carriers::Carrier> carrier_;
  const Assignment assignment_;
  Driver& driver_;
  Books account_;

  uint64_t looked_at_bytes_ = 0, looked_at_commands_ = 0;  // when the books were last compared
  int64_t looked_host_us_ = 0, looked_device_us_ = 0;
  std::mutex turn_;  // a frame is executed, or the bookkeeper looks
  uint64_t looked_at_frame_ = 0;
  std::mutex ended_lock_;
  std::string ended_why_;  // by the bookkeeper
  Context* current_ = nullptr;
  Context* context_cache_ = nullptr;  // of the last command
  std::string refused_;
  uint64_t submitted_ = 0;
  uint64_t submitted_when_lent_ = ~uint64_t{0};

  std::mutex send_lock_;  // writer_; taken by waiter threads too
  wire::FrameWriter writer_;
  std::atomic<uint64_t> taken_{0};        // last frame that was executed completely
  std::atomic<uint64_t> base_credit_{0};  // what the client may have sent, but for
  std::atomic<uint64_t> ahead_{0};        // what the deputy has dealt with
  std::atomic<uint64_t> told_{0};         // what the client knows of both

  std::map<uint32_t, Context*> contexts_by_id_;
  Memory memory_;
  VirtualMemory virtual_memory_;
  std::vector<PendingFree> pending_frees_;
  std::vector<CUevent> spare_events_;
  Staging staging_;
  LentBulk lent_;
  OutputCapture printf_{STDOUT_FILENO, OutputCapture::Kind::kWait, [this](const std::string& text) {
                          send_text(wire::EventKind::kPrintf, 0, text);
                        }};
  OutputCapture reports_{STDERR_FILENO, OutputCapture::Kind::kTee};
  OutgoingCopies outgoing_;
  HostFunctions host_functions_;
  Waiters waiters_;
  Bookkeeper bookkeeper_{[this] { return look_at_books(); }};
  Frames reader_;  // its deputy uses most of the above
};

// The hand-written operations (operations_*.cc): each answers, and says whether the session goes
// on.
bool execute_context(SessionState& session, const Command& command);
bool execute_memory(SessionState& session, const Command& command);
bool execute_copy(SessionState& session, const Command& command);
bool execute_module(SessionState& session, const Command& command);
bool execute_stream(SessionState& session, const Command& command);
bool execute_launch(SessionState& session, const Command& command);
bool execute_link(SessionState& session, const Command& command);
bool execute_virtual_memory(SessionState& session, const Command& command);
bool execute_graph(SessionState& session, const Command& command);
// `broken`: the driver takes no calls for its context any more.
void drop_graph_exec(SessionState& session, wire::Handle handle, bool broken);
bool execute_host_function(SessionState& session, const Command& command);
// With the copy's lock held: sends the pieces that the device is done with.
void send_finished(SessionState& session, Outgoing& copy);
void drop_module(SessionState& session, wire::Handle handle, bool unload);

bool is_sticky(CUresult error);

}  // namespace gpupool::worker
