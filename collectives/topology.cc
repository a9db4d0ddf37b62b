#include "holdfast/collectives/topology.h"

#include <unistd.h>

#include <algorithm>

#include "byte_codec.h"

namespace holdfast {
namespace {

Bytes encode(const RankPlacement& p) {
  ByteWriter writer;
  writer.u32(static_cast<std::uint32_t>(p.rank)).u64(static_cast<std::uint64_t>(p.pid));
  for (const std::string* text : {&p.host, &p.cpus, &p.numa, &p.gpu_uuid, &p.gpu_pci}) writer.text(*text);
  writer.u32(static_cast<std::uint32_t>(p.axes.size()));
  for (const auto& [axis, index] : p.axes) writer.text(axis).u32(static_cast<std::uint32_t>(index));
  return writer.take();
}

bool decode(const Bytes& bytes, RankPlacement* p) {
  ByteReader reader(bytes);
  p->rank = static_cast<int>(reader.u32());
  p->pid = static_cast<std::int64_t>(reader.u64());
  for (std::string* text : {&p->host, &p->cpus, &p->numa, &p->gpu_uuid, &p->gpu_pci}) *text = reader.text();
  for (std::uint32_t left = reader.u32(); left > 0 && reader.ok(); --left) {
    const std::string axis(reader.text());
    p->axes[axis] = static_cast<int>(reader.u32());
  }
  return reader.done();
}

std::string ranks_text(int first, int last) {
  if (first == last) return "rank " + std::to_string(first);
  return "ranks " + std::to_string(first) + "-" + std::to_string(last);
}

// Everything of a placement that neighbours can have in common.
std::string hardware_text(const RankPlacement& p) {
  std::string text;
  if (!p.cpus.empty()) text += " cpus " + p.cpus;
  if (!p.numa.empty()) text += " numa " + p.numa;
  if (!p.gpu_uuid.empty()) text += " gpu " + p.gpu_uuid + " at " + p.gpu_pci;
  return text;
}

}  // namespace

std::string RankPlacement::device() const {
  return gpu_uuid.empty() ? host + "/slot " + std::to_string(local_rank) : host + "/" + gpu_uuid;
}

Topology::Topology(std::vector<RankPlacement> placements) : placements_(std::move(placements)) {
  std::ranges::sort(placements_, {}, &RankPlacement::rank);
}

const RankPlacement* Topology::find(int rank) const {
  const auto found = std::ranges::lower_bound(placements_, rank, {}, &RankPlacement::rank);
  return found != placements_.end() && found->rank == rank ? &*found : nullptr;
}

std::string Topology::map(std::size_t most_hosts) const {
  std::vector<std::string> hosts;  // in order of their first rank
  std::map<std::string, std::vector<const RankPlacement*>> by_host;
  for (const RankPlacement& p : placements_) {
    auto& ranks = by_host[p.host];
    if (ranks.empty()) hosts.push_back(p.host);
    ranks.push_back(&p);
  }
  std::string text = std::to_string(placements_.size()) + (placements_.size() == 1 ? " rank" : " ranks") +
                     " on " + std::to_string(hosts.size()) + (hosts.size() == 1 ? " host\n" : " hosts\n");
  for (std::size_t h = 0; h < hosts.size() && h < most_hosts; ++h) {
    const auto& ranks = by_host[hosts[h]];
    text += "  " + hosts[h] + ": ";
    for (std::size_t begin = 0; begin < ranks.size();) {
      std::size_t end = begin + 1;
      while (end < ranks.size() && ranks[end]->rank == ranks[end - 1]->rank + 1 &&
             hardware_text(*ranks[end]) == hardware_text(*ranks[begin])) {
        ++end;
      }
      if (begin > 0) text += ", ";
      text += ranks_text(ranks[begin]->rank, ranks[end - 1]->rank) + hardware_text(*ranks[begin]);
      begin = end;
    }
    text += "\n";
  }
  const std::size_t left = hosts.size() - std::min(hosts.size(), most_hosts);
  if (left > 0) text += "  and " + std::to_string(left) + (left == 1 ? " more host\n" : " more hosts\n");
  return text;
}

Status gather_topology(Collective& collective, RankPlacement mine, Topology* out) {
  std::vector<Bytes> all;
  if (Status s = collective.gather(encode(mine), &all); !s.ok()) return s;
  std::vector<RankPlacement> placements;
  std::map<std::string, int> seen;  // ranks of a host so far
  for (const Bytes& bytes : all) {
    RankPlacement p;
    if (!decode(bytes, &p)) return Status::internal("malformed placement from another rank");
    p.local_rank = seen[p.host]++;
    placements.push_back(std::move(p));
  }
  *out = Topology(std::move(placements));
  return Status();
}

RankPlacement basic_placement(int rank) {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  RankPlacement placement;
  placement.rank = rank;
  placement.host = host;
  placement.pid = getpid();
  return placement;
}

}  // namespace holdfast
