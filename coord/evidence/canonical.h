// The form of a manifest whose SHA-256 is the bundle's content id. It depends neither on Protobuf's version
// nor on the platform; whoever has the fields can make it again.
//
//   message    {"FIELD":VALUE,...}: the fields that are present, by their names in evidence.proto, in the
//   order of the
//              alphabet (of bytes); repeated ones that hold something, as [VALUE,...] in their order
//   number     in decimal, with a minus when negative; an enum by its number; a bool as true or false
//   double     "0x" and the 16 hexadecimal digits of its IEEE 754 bits, in quotes: NaN and -0 are themselves
//   text       strings and bytes alike: their bytes in hexadecimal, in quotes
//
// No spaces, no line ends, lower case. A field that a later version adds changes no id of a manifest that
// lacks it. `time` is a field like any other: two captures of one incident have different ids. Where a bundle
// lies is not in it.
#pragma once

#include <string>

namespace holdfast {

class BundleManifest;

std::string canonical_manifest(const BundleManifest& manifest);

// "training-incident-evidence@sha256:<hex>", of 32 bytes.
std::string evidence_content_id(const std::string& sha256);

}  // namespace holdfast
