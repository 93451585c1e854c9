// Streams: a queue and a thread each. Every launch is checked against earlier accesses by vector clocks, so a missing
// dependency is found when the task is queued, whatever the timing of this run.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

#include "block.h"
#include "clock.h"

// CPython's stable ABI, without its headers.
extern "C" {
int Py_IsInitialized();
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace fake {

// Bytes of a block that a task touches. `reads` is false where the old contents do not matter.
struct Use {
  BlockPtr block;
  size_t begin, end;
  bool reads, writes;
};

struct Task {
  std::function<void()> body;
  std::vector<Use> uses;
  uint64_t number = 0;
  std::string name;
  bool speculative = false;  // it may read garbage
};

struct Stream {
  int id;
  std::deque<Task> queue;
  uint64_t launched = 0, finished = 0;  // numbers of tasks
  Clock clock;                          // what comes before the next task
  std::vector<BlockPtr> freed;          // since the last allocation on this stream
  std::deque<std::pair<uint64_t, std::shared_ptr<double>>> marks;  // events to come: they get the time
  bool held = false, idle = false;
  std::condition_variable arrival;
};

struct Event {
  int stream;
  uint64_t number;
  Clock clock;
  std::shared_ptr<double> at;  // milliseconds, once it is complete
};

// A copy to pinned memory. It becomes visible when the host has waited for it, not before.
struct Publication {
  int stream;
  uint64_t number;
  std::function<void()> show;
};

inline std::mutex& mutex = *new std::mutex;  // guards all that follows, and `accesses` and `recorded` of blocks
inline std::condition_variable& progress = *new std::condition_variable;
inline int waiting_threads = 0;
inline std::vector<Stream*>& streams = *new std::vector<Stream*>;
inline Clock& host = *new Clock;  // tasks that the host has waited for; one clock for all host threads
inline std::vector<Publication>& publications = *new std::vector<Publication>;
inline std::vector<std::string>& reports = *new std::vector<std::string>;
inline std::string& device_error = *new std::string;
inline thread_local int current_stream = 0;
inline thread_local bool speculative = false;  // what this thread launches

// torch.Stream.synchronize keeps the GIL; a task may want it.
class WithoutGil {
 public:
  WithoutGil() { if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread(); }
  ~WithoutGil() { if (state_) PyEval_RestoreThread(state_); }

 private:
  void* state_ = nullptr;
};

// Nobody waits for a mutex with the GIL, as torch.Event.query would: who has the mutex may let go of the last reference
// to memory that Python has seen, and torch takes the GIL for that.
class Lock : public std::unique_lock<std::mutex> {
 public:
  explicit Lock(std::mutex& guard) : unique_lock(guard, std::try_to_lock) {
    if (owns_lock()) return;
    WithoutGil without_gil;
    lock();
  }
};

// The functions below that take no Lock and are not called "...locked" take `mutex` themselves.

inline void report_locked(const std::string& text) {
  reports.push_back(text);
  TORCH_CHECK(false, text);
}

inline void hidden_sync(const std::string& operation) {
  if (!report_syncs) return;
  Lock lock(mutex);
  report_locked("fake: called a synchronizing operation: " + operation);
}

inline void raise_device_error_locked() {
  if (device_error.empty()) return;
  std::string text;
  std::swap(text, device_error);
  TORCH_CHECK(false, "fake: asynchronous device error: ", text);
}

inline void wait_finished(Lock& lock, const Stream& stream, uint64_t number) {
  waiting_threads++;
  progress.wait(lock, [&] { return stream.finished >= number; });
  waiting_threads--;
}

// Runs a task on the stream's thread. Returns the error, or an empty text.
inline std::string run(Task& task) {
  std::string error;
  for (auto& use : task.uses) {
    auto garbage = use.block->garbage();
    if (garbage.empty()) continue;
    if (use.reads && !task.speculative) {
      error = task.name + " reads " + garbage;
      Lock lock(mutex);
      reports.push_back("fake: " + error);
    }
    if (use.writes && !use.reads && use.begin == 0 && use.end >= use.block->size) use.block->set_garbage("");
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    task.body();
  } catch (const std::exception& e) {
    error = e.what();
  }
  return error;
}

inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void serve(Stream& stream) {
  at::init_num_threads();  // as many as torch.set_num_threads says
  Lock lock(mutex);
  for (;;) {
    stream.idle = true;
    stream.arrival.wait(lock, [&] { return !stream.queue.empty() && !stream.held; });
    stream.idle = false;
    Task task = std::move(stream.queue.front());
    stream.queue.pop_front();
    lock.unlock();
    auto number = task.number;
    auto error = run(task);
    task = Task{};  // frees tensors, which takes the lock
    lock.lock();
    if (!error.empty() && device_error.empty()) device_error = error;
    stream.finished = number;
    for (; !stream.marks.empty() && stream.marks.front().first <= number; stream.marks.pop_front())
      *stream.marks.front().second = now_ms();
    if (waiting_threads) progress.notify_all();
  }
}

inline Stream& stream_locked(int id) {
  while ((int)streams.size() <= id) {
    auto* stream = new Stream;
    stream->id = (int)streams.size();
    streams.push_back(stream);
    std::thread([stream] { serve(*stream); }).detach();
  }
  return *streams.at(id);
}

inline uint64_t push_locked(Stream& stream, std::string name, std::vector<Use> uses, std::function<void()> body) {
  auto number = ++stream.launched;
  stream.clock.advance(stream.id, number);
  stream.queue.push_back({std::move(body), std::move(uses), number, std::move(name), speculative});
  if (stream.idle) stream.arrival.notify_one();
  return number;
}

// Notes that task `number` of `stream` makes this access. Returns the race that it is part of, or an empty text.
inline std::string note_access_locked(const Stream& stream, uint64_t number, const std::string& task, const Use& use) {
  auto& accesses = use.block->accesses;
  auto ordered = [&](const Access& a) { return a.stream == stream.id || a.number <= stream.clock.of(a.stream); };
  std::string race;
  for (auto& a : accesses)
    if (!ordered(a) && a.begin < use.end && use.begin < a.end && (a.write || use.writes))
      race = task + " on stream " + std::to_string(stream.id) + (use.writes ? " writes" : " reads") + " what " + a.task +
          " on stream " + std::to_string(a.stream) + (a.write ? " writes" : " reads") + "; nothing orders them";
  // Who races with an ordered access inside this one races with this one, too.
  auto covered = [&](const Access& a) {
    return ordered(a) && a.begin >= use.begin && a.end <= use.end && (use.writes || !a.write);
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), covered), accesses.end());
  accesses.push_back({stream.id, number, use.begin, use.end, use.writes, task});
  return race;
}

// Puts a task on the current stream. Raises, after the launch: a race; before it: the error of an earlier task.
inline uint64_t launch(const std::string& name, const std::vector<Use>& uses, std::function<void()> body) {
  Lock lock(mutex);
  raise_device_error_locked();
  auto& stream = stream_locked(current_stream);
  stream.clock.join(host);
  auto number = push_locked(stream, name, uses, std::move(body));
  std::string race;
  for (auto& use : uses) {
    auto found = note_access_locked(stream, number, name, use);
    if (!found.empty()) race = found;
  }
  if (!race.empty()) report_locked("fake: race: " + race);
  return number;
}

inline Event record_locked(Stream& stream) {
  stream.clock.join(host);
  auto at = std::make_shared<double>(now_ms());
  if (stream.finished < stream.launched) stream.marks.emplace_back(stream.launched, at);
  return {stream.id, stream.launched, stream.clock, at};
}

inline void wait_event_locked(Stream& stream, const Event& event) {
  if (event.stream == stream.id) return;
  stream.clock.join(event.clock);
  auto* other = &stream_locked(event.stream);
  push_locked(stream, "wait_event", {}, [other, number = event.number] {
    Lock lock(mutex);
    wait_finished(lock, *other, number);
  });
}

inline void host_has_seen_locked(const Clock& clock) {
  host.join(clock);
  // Under the lock: who sees the event complete must see the values.
  auto shown = [](Publication& p) {
    if (p.number > host.of(p.stream)) return false;
    p.show();
    return true;
  };
  publications.erase(std::remove_if(publications.begin(), publications.end(), shown), publications.end());
}

inline bool query_locked(const Event& event) {
  if (stream_locked(event.stream).finished < event.number) return false;
  host_has_seen_locked(event.clock);
  return true;
}

// The host waits. Raises the error of an earlier task.
inline void synchronize(const Event& event) {
  WithoutGil without_gil;
  Lock lock(mutex);
  wait_finished(lock, stream_locked(event.stream), event.number);
  host_has_seen_locked(event.clock);
  raise_device_error_locked();
}
inline void synchronize_stream(int id) {
  Event event;
  {
    Lock lock(mutex);
    event = record_locked(stream_locked(id));
  }
  synchronize(event);
}

}  // namespace fake
