import java.io.*;
import java.security.*;
import java.util.*;
import javax.security.auth.*;
import javax.security.auth.login.*;
import javax.security.sasl.*;

/**
 * A client's side of a log-in with GSSAPI, without a connection: SERVICE HOST PRINCIPAL KEYTAB. For each challenge, a line in base64, it prints the next
 * token, and whether it's the last one.
 */
public final class Tokens {
    public static void main(String[] args) throws Exception {
        Configuration keys = new Configuration() {
            @Override
            public AppConfigurationEntry[] getAppConfigurationEntry(String name) {
                Map<String, String> options = Map.of("useKeyTab", "true", "storeKey", "true", "isInitiator", "true", "principal", args[2], "keyTab", args[3]);
                return new AppConfigurationEntry[] {
                    new AppConfigurationEntry("com.sun.security.auth.module.Krb5LoginModule", AppConfigurationEntry.LoginModuleControlFlag.REQUIRED, options)
                };
            }
        };
        LoginContext login = new LoginContext("client", null, null, keys);
        login.login();
        Subject.doAs(login.getSubject(), (PrivilegedExceptionAction<Void>) () -> {
            SaslClient client = Sasl.createSaslClient(new String[] {"GSSAPI"}, null, args[0], args[1], Map.of(), null);
            BufferedReader challenges = new BufferedReader(new InputStreamReader(System.in));
            for (String line; (line = challenges.readLine()) != null; ) {
                byte[] token = client.evaluateChallenge(Base64.getDecoder().decode(line));
                System.out.println((client.isComplete() ? "last " : "next ") + (token == null ? "" : Base64.getEncoder().encodeToString(token)));
            }
            return null;
        });
    }
}
