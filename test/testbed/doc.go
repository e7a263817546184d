// Package testbed runs the built kmirror as a process between two clusters, for the end-to-end tests: the process ([Instance]), writers
// with and without a memory of what was acknowledged ([Ledger], [Load]), a witness of requests ([Relay]), and one of sockets
// ([SocketWatch]). It tests nothing by itself. Packages that use it need
//
//	func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
package testbed
